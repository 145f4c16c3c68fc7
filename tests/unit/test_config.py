"""What a pool's YAML file may say, and how exactly a complaint points at what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.assembly import build_instances, build_router
from headway.config import Secret, load_config, parse_config
from headway.errors import ConfigError, ProfileError

POOL = """\
models:
  - {name: qwen3-8b, price: {input_per_1m: 0.072, output_per_1m: 0.287}, context_tokens: 32768, parameters: 8.2e9,
     prior: {quality: 0.79, output_tokens: 300, tasks: {summarise: {quality: 0.87, output_tokens: 700}}}}
  - {name: hosted-large}
instances:
  - {id: h100-a, model: qwen3-8b, api_base: "http://127.0.0.1:8101/v1", engine: vllm-0.32, profile: h100-qwen3-8b,
     limits: {max_num_seqs: 256}, snapshots: {shared_memory: headway-h100-a}}
  - {id: plain, model: qwen3-8b, api_base: "http://127.0.0.1:8102/v1", engine: vllm-0.32}
  - {id: api-1, model: hosted-large, api_base: "https://api.example.com/v1", api_key: "env:EXAMPLE_KEY", engine: hosted}
aliases: {auto: {candidates: all}, cheap: {candidates: [qwen3-8b]}}
routing: {policy: bear, lambda_per_musd: 5.0e-4, delta_per_ms: 0, predictor: prior, default_ttft_ms: 800,
          on_infeasible: best_effort, fallback: least_ttft}
resilience: {deadline_s: 120, attempts: 2, first_byte_timeout_s: 20, idle_timeout_s: 60, breaker_failures: 5,
             breaker_open_s: 5}
server: {host: 127.0.0.1, port: 8080, max_body_mb: 64, max_inflight: 4096, drain_s: 30}
"""


def complaint(text: str) -> ConfigError:
    """The error that ``text`` is refused with."""
    with pytest.raises(ConfigError) as caught:
        build_router(parse_config(text, path="pool.yaml"))
    return caught.value


def test_every_documented_key_is_read() -> None:
    """A file that uses every documented key is accepted, and the values arrive with their types."""
    config = parse_config(POOL)
    assert config.models[0].parameters == 8.2e9
    assert config.models[0].prior is not None
    assert config.models[0].prior.tasks["summarise"].output_tokens == 700
    assert config.routing.lambda_per_musd == 5e-4
    assert config.aliases["cheap"].candidates == ["qwen3-8b"]
    assert config.server.port == 8080


@pytest.mark.parametrize("name", ["pool.yaml", "mixed_pool.yaml"])
def test_examples_are_valid(name: str) -> None:
    """The examples that are shipped pass the same checks as a user's file."""
    build_router(load_config(Path(__file__).parents[2] / "examples" / name))


def test_auto_needs_no_entry() -> None:
    """``auto`` means every candidate even where no alias says so."""
    assert parse_config(POOL.replace("aliases:", "#")).aliases["auto"].candidates == "all"


@pytest.mark.parametrize(
    ("old", "new", "key", "line", "words"),
    [
        ("lambda_per_musd", "lambda_per_msd", "routing.lambda_per_msd", 11, "did you mean 'lambda_per_musd'?"),
        ("max_num_seqs", "max_num_seq", "instances[0].limits.max_num_seq", 7, "did you mean 'max_num_seqs'?"),
        ("policy: bear", "policy: baer", "routing.policy", 11, "did you mean 'bear'?"),
        ("engine: hosted", "engine: hostd", "instances[2].engine", 9, "did you mean 'hosted'?"),
        ("[qwen3-8b]", "[qwen3-9b]", "aliases.cheap.candidates[0]", 10, "did you mean 'qwen3-8b'?"),
        ("summarise:", "summarize:", "models[0].prior.tasks.summarize", 3, "did you mean 'summarise'?"),
        ("model: hosted-large", "model: hosted", "instances[2].model", 9, "did you mean 'hosted-large'?"),
        ("id: plain", "id: h100-a", "instances[1].id", 8, "used twice"),
        ("name: hosted-large}", "name: qwen3-8b}", "models[1].name", 4, "used twice"),
        ("port: 8080", "port: 8080, port: 1", "server.port", 15, "repeated key"),
        ("port: 8080", "port: '8080'", "server.port", 15, "Expected `int`, got `str`"),
        ("8.2e9", "'8.2e9'", "models[0].parameters", 2, "got `str`"),
        ("attempts: 2", "attempts: 0", "resilience.attempts", 13, ">= 1"),
        ("quality: 0.79", "quality: 1.79", "models[0].prior.quality", 3, "<= 1"),
        ("quality: 0.79", "quality: .nan", "models[0].prior.quality", 3, "finite"),
        ("https://api", "ftp://api", "instances[2].api_base", 9, "http or https URL"),
        ("http://127.0.0.1:8102", "http://u:p@127.0.0.1:8102", "instances[1].api_base", 8, "use api_key"),
        ("{auto:", "{qwen3-8b:", "aliases.qwen3-8b", 10, "a model of the pool has this name"),
        ("[qwen3-8b]", "[]", "aliases.cheap.candidates", 10, "at least one model"),
        ("engine: hosted}", "engine: hosted, profile: h100-qwen3-8b}", "instances[2].profile", 9, "hosted instance"),
        ("env:EXAMPLE_KEY", "env:", "instances[2].api_key", 9, "names no environment variable"),
        ("engine: vllm-0.32}", "engine: vllm-0.32, limits: {block_size: 8}}", "instances[1].limits", 8, "of a profile"),
        ("engine: hosted}", "engine: hosted, shadow_state: true}", "instances[2].shadow_state", 9, "hosted instance"),
        ("engine: vllm-0.32}", "engine: vllm-0.32, shadow_state: true}", "instances[1].shadow_state", 8, "a profile"),
        ("256}, snap", "256}, shadow_state: true, snap", "instances[0].shadow_state", 7, "replayed from these"),
        ("{name: hosted-large}", "{}", "models[1].name", 4, "is missing"),
    ],
)  # fmt: skip
def test_complaints_name_path_line_and_key(old: str, new: str, key: str, line: int, words: str) -> None:
    """What is wrong is named by file, line, column, dotted key and, where there is one, the nearest known name."""
    assert POOL.count(old) >= 1
    error = complaint(POOL.replace(old, new, 1))
    assert (error.path, error.key, error.line) == ("pool.yaml", key, line)
    assert error.column is not None
    assert words in str(error)
    assert str(error).startswith(f"pool.yaml:{line}:{error.column}: {key}: ")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("{name: hosted-large}", "{name: hosted-large, tokenizer: t.json}", "models[1].tokenizer"),
    ],
)
def test_features_that_are_not_built_are_refused_by_name(old: str, new: str, key: str) -> None:
    """A key of a later feature is turned down by name, not as a typing error."""
    error = complaint(POOL.replace(old, new))
    assert error.key == key
    assert "not built yet" in str(error)


def test_a_predictor_that_is_not_there_is_named_where_it_stands() -> None:
    """What is no prior is the path of an artifact."""
    error = complaint(POOL.replace("predictor: prior", "predictor: nowhere.hw"))
    assert (error.key, error.line) == ("routing.predictor", 11)
    assert "nowhere.hw: cannot be read" in str(error)


def test_profiles_are_checked_where_they_are_named() -> None:
    """An unknown profile is a ProfileError at the instance's own line, with the nearest shipped name."""
    error = complaint(POOL.replace("profile: h100-qwen3-8b", "profile: h100-qwen-8b"))
    assert isinstance(error, ProfileError)
    assert (error.key, error.line) == ("instances[0].profile", 6)
    assert "h100-qwen3-8b" in str(error)


def test_truth_profiles_are_refused(tmp_path: Path) -> None:
    """The clock of a simulated engine may not feed an estimator."""
    from headway.profiles import TRUTH_DIRECTORY

    truth = TRUTH_DIRECTORY / "h100-qwen3-8b.yaml"
    error = complaint(POOL.replace("profile: h100-qwen3-8b", f"profile: {truth}"))
    assert isinstance(error, ProfileError)
    assert "truth profile" in str(error)


def test_impossible_limits_are_refused_at_their_line() -> None:
    """An override that no engine accepts together with its profile names the limit."""
    error = complaint(POOL.replace("{max_num_seqs: 256}", "{chunked_prefill: false}"))
    assert error.key == "instances[0].limits.max_num_batched_tokens"
    assert error.line == 7


@pytest.mark.parametrize(
    ("written", "shadowed"), [("", True), (", shadow_state: true", True), (", shadow_state: false", False)]
)
def test_an_engine_without_snapshots_has_a_shadow_where_a_profile_says_how(written: str, shadowed: bool) -> None:
    """By default it is replayed from what is sent there; the key switches that off, or says it once more."""
    text = POOL.replace("engine: vllm-0.32}", f"engine: vllm-0.32, profile: h100-qwen3-8b{written}}}")
    views = build_router(parse_config(text)).fleet.views
    assert [view.shadow is not None for view in views] == [False, shadowed, False]


def test_limits_override_the_profile() -> None:
    """``limits`` replace single limits of the profile and leave the others."""
    instance = build_instances(parse_config(POOL))[0]
    assert instance.limits is not None
    assert instance.limits.max_num_seqs == 256
    assert instance.limits.num_blocks == 23894


def test_bad_segment_names_are_refused() -> None:
    """A segment name that is no plain file name is found before anything starts."""
    assert complaint(POOL.replace("headway-h100-a", "../x")).key == "instances[0].snapshots.shared_memory"


@pytest.mark.parametrize("address", ["tcp://10.0.0.5", "tcp://*:7101", "ipc:///tmp/x", "10.0.0.5:7101"])
def test_bad_zeromq_addresses_are_refused(address: str) -> None:
    """An address that nobody can connect to is found before anything starts, at its own key."""
    error = complaint(POOL.replace("{shared_memory: headway-h100-a}", f'{{zeromq: "{address}"}}'))
    assert (error.key, error.line) == ("instances[0].snapshots.zeromq", 7)
    assert "must be tcp://HOST:PORT" in str(error)


def test_snapshots_come_from_one_place() -> None:
    """Shared memory or ZeroMQ: neither both nor none, and no two instances from one."""
    over_zeromq = POOL.replace("{shared_memory: headway-h100-a}", '{zeromq: "tcp://10.0.0.5:7101"}')
    source = parse_config(over_zeromq).instances[0].snapshots
    assert source is not None
    assert (source.transport, source.place) == ("zeromq", "tcp://10.0.0.5:7101")
    build_instances(parse_config(over_zeromq))
    both = POOL.replace("{shared_memory: headway-h100-a}", '{shared_memory: x, zeromq: "tcp://10.0.0.5:7101"}')
    for text in (both, POOL.replace("{shared_memory: headway-h100-a}", "{}")):
        error = complaint(text)
        assert error.key == "instances[0].snapshots"
        assert "one of shared_memory" in str(error)
    twice = over_zeromq.replace("engine: vllm-0.32}", 'engine: vllm-0.32, snapshots: {zeromq: "tcp://10.0.0.5:7101"}}')
    error = complaint(twice)
    assert error.key == "instances[1].snapshots.zeromq"
    assert "'h100-a' publishes there already" in str(error)


def test_secrets_show_nowhere() -> None:
    """A key in the file itself appears neither in repr nor in a complaint; a reference does."""
    text = POOL.replace("env:EXAMPLE_KEY", "sk-very-secret")
    config = parse_config(text)
    assert "very-secret" not in repr(config)
    assert "very-secret" not in str(config.instances[2].api_key)
    assert repr(Secret("env:EXAMPLE_KEY")) == "Secret(env:EXAMPLE_KEY)"


def test_hash_follows_settings_only() -> None:
    """The configuration hash changes with a setting, not with comments, key order or a secret."""
    plain = parse_config(POOL).config_hash
    assert parse_config("# a comment\n" + POOL).config_hash == plain
    assert (
        parse_config(POOL.replace("deadline_s: 120, attempts: 2", "attempts: 2, deadline_s: 120")).config_hash == plain
    )
    assert parse_config(POOL.replace("attempts: 2", "attempts: 3")).config_hash != plain
    literal = [parse_config(POOL.replace("env:EXAMPLE_KEY", key)).config_hash for key in ("sk-one", "sk-two")]
    assert literal[0] == literal[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("[]", "must be a mapping"),
        ("models: [\n", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "single document"),
        ("\x01", "not valid YAML"),
        ("models: &m\n - *m\ninstances: []", "refers to itself"),
        ("{? [1] : 2}", "a key must be text"),
        ("1: 2", "a key must be text"),
        ("models: []\ninstances: []", "at least one model"),
        ("models: [{name: m}]\ninstances: []", "at least one instance"),
        ("models: [{name: !!python/name:os.system x}]\ninstances: []", "python"),
    ],
)
def test_what_is_no_pool_is_refused(text: str, words: str) -> None:
    """Empty, broken, circular or foreign YAML is a ConfigError, never a crash."""
    assert words in str(complaint(text))


def test_alias_bombs_end_early() -> None:
    """Anchors that unroll without end are refused instead of filling memory."""
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    text = "models:\n  - name: m\n    prior:\n      tasks:\n" + "\n".join("        " + row for row in rows)
    assert complaint(text + "\ninstances: []")


def test_merge_keys_share_settings() -> None:
    """YAML anchors with ``<<`` fill in what a mapping leaves out."""
    text = (
        "models: [{name: m}]\ninstances:\n"
        "  - &base {id: a, model: m, api_base: 'http://127.0.0.1:1/v1', engine: vllm-0.32}\n"
        "  - {<<: *base, id: b}\n"
    )
    assert [instance.id for instance in parse_config(text).instances] == ["a", "b"]


def test_unreadable_files_are_complaints(tmp_path: Path) -> None:
    """A missing file, a directory and text that is not UTF-8 are ConfigErrors with the path."""
    (tmp_path / "latin.yaml").write_bytes(b"models: \xff")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path)


def test_the_queue_is_configured() -> None:
    """``on_infeasible: queue`` and the queue's bounds are read; a policy that holds anyway takes no ``reject``."""
    text = POOL.replace("on_infeasible: best_effort", "on_infeasible: queue") + (
        "queue: {max_length: 10, max_wait_s: 2.5, on_timeout: best_effort}\n"
    )
    config = parse_config(text)
    assert (config.routing.on_infeasible, config.queue.max_length, config.queue.max_wait_s) == ("queue", 10, 2.5)
    assert config.queue.on_timeout == "best_effort"
    refused = complaint(
        POOL.replace("policy: bear", "policy: central_fcfs").replace(
            "on_infeasible: best_effort", "on_infeasible: reject"
        )
    )
    assert refused.key == "routing.on_infeasible"
    assert "queue.on_timeout" in str(refused)
