"""The ``headway`` command: names the verbs and maps Headway's errors to exit codes.

Exit codes: 0 done, 1 failed, 2 usage or configuration. Verbs are imported when called, so ``headway version`` stays
quick however heavy another verb is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import headway
from headway.errors import ConfigError, DatasetError, EngineInputError, HeadwayError

app = App(
    name="headway",
    help="Route every LLM query to the model instance that gives the most useful answer in time.",
    version=headway.__version__,
)
_VERBS = {
    "demo": ("headway.cli.demo:demo", "Run a mixed pool of simulated engines under several policies and compare them."),
    "serve": ("headway.cli.serve:serve", "Serve the OpenAI-compatible gateway described by a configuration file."),
    "validate": ("headway.cli.validate:validate", "Check a configuration file and say what is wrong, and where."),
    "route": ("headway.cli.route:route", "Explain where one prompt would go on the live pool, and why."),
    "engine": ("headway.cli.engine:engine", "Run one simulated OpenAI-compatible engine."),
    "calibrate": ("headway.cli.calibrate:calibrate", "Fit step times to an engine's step log and write a profile."),
    "collect": ("headway.cli.collect:collect", "Run prompts through every model of a pool and keep the answers."),
    "judge": ("headway.cli.judge:app", "Give collected answers a quality, by a judge or a rule; compare judges."),
    "train": ("headway.cli.train:train", "Train a predictor of quality and output length on evaluation rows."),
    "evaluate": ("headway.cli.evaluate:evaluate", "Measure predictors on prompts that they were not trained on."),
    "lab": ("headway.cli.lab:app", "Compare routing policies on simulated fleets."),
    "whatif": ("headway.cli.whatif:whatif", "Route logged traffic once more: other policies, another pool."),
    "bench": ("headway.cli.bench:app", "Measure what the core, the gateway and the lab cost."),
    "version": ("headway.cli.version:version", "Print the versions of Headway, its core, Python and the platform."),
}
for _name, (_target, _help) in _VERBS.items():
    app.command(_target, name=_name, help=_help)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default the process's, and exit with its code."""
    try:
        code = app(
            sys.argv[1:] if arguments is None else list(arguments),
            exit_on_error=False,
            print_error=True,
            result_action="return_value",
        )
    except CycloptsError:  # already printed, with what would have been right
        sys.exit(2)
    except (ConfigError, DatasetError, EngineInputError) as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(2)
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
