"""The bytes of a simulated engine's answers, in vLLM's shapes: streamed one word per token, or whole.

What does not change from token to token is encoded once per choice, so that a token costs a few byte strings. The
engine's own figures stand beside the usual fields as ``x_headway_engine``: TTFT and queue time by the virtual clock,
without the network and the process around it, so that a prediction can be held against the clock it predicts.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec

from headway.engines.simulated import Generation

DONE: Final = b"data: [DONE]\n\n"

_TEXT: Final = (
    "the model reads every token of a long prompt and then it writes one word after another while other requests wait "
    "in the queue for room in memory so a short answer may come late when many long ones run before it but most "
    "queries leave on time because their train was chosen with care between slow lines and fast ones"
)
_WORDS: Final = [word.encode() for word in _TEXT.split(" ")]
_STRIDE: Final = 7  # prime to the number of words, so that neighbours differ and every word comes


class AnswerWriter:
    """Writes the answer of one HTTP request, whose prompts became ``generations``."""

    def __init__(self, *, answer_id: str, model: str, chat: bool, generations: Sequence[Generation]) -> None:
        self._chat = chat
        self._generations = generations
        self._seen = [0] * len(generations)
        self._first_word = [zlib.crc32(generation.request_id.encode()) for generation in generations]
        kind = (
            "chat.completion" if chat else "text_completion",
            "chat.completion.chunk" if chat else "text_completion",
        )
        head = msgspec.json.encode({"id": answer_id, "object": kind[0], "created": int(time.time()), "model": model})
        self._whole_head = head[:-1]
        self._head = b"data: " + head[:-1].replace(b'"%s"' % kind[0].encode(), b'"%s"' % kind[1].encode(), 1)

    def new_events(self) -> bytes:
        """The events of all tokens that came since the last call."""
        out = bytearray()
        for index, generation in enumerate(self._generations):
            seen, end = self._seen[index], generation.num_tokens
            if seen == end:
                continue
            if seen == 0 and self._chat:
                out += self._event(index, b'"delta":{"role":"assistant","content":""}', b"null")
            last = end - 1 if generation.finish_reason is not None else end
            opening = self._head + b',"choices":[{"index":%d,%s' % (index, self._text_opening())
            closing = (b'"}' if self._chat else b'"') + b',"logprobs":null,"finish_reason":null}]}\n\n'
            for position in range(seen, last):
                out += opening
                out += self._word(index, position)
                out += closing
            if last < end:
                text = self._text_opening() + self._word(index, last) + (b'"}' if self._chat else b'"')
                out += self._event(index, text, b'"%s"' % str(generation.finish_reason).encode(), generation)
            self._seen[index] = end
        return bytes(out)

    def usage_event(self) -> bytes:
        """The event that ``stream_options.include_usage`` asks for."""
        return self._head + b',"choices":[],' + self._usage() + b"," + self._figures(self._generations[0]) + b"}\n\n"

    def whole(self) -> bytes:
        """The answer in one piece, once every generation has ended."""
        choices = []
        for index, generation in enumerate(self._generations):
            text = b"".join(self._word(index, position) for position in range(generation.num_tokens)).decode()
            choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": generation.finish_reason}
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        tail = self._usage() + b"," + self._figures(self._generations[0])
        return self._whole_head + b',"choices":' + msgspec.json.encode(choices) + b"," + tail + b"}"

    def _event(self, index: int, text: bytes, reason: bytes, generation: Generation | None = None) -> bytes:
        figures = b"" if generation is None else b"," + self._figures(generation)
        choice = b'{"index":%d,%s,"logprobs":null,"finish_reason":%s}' % (index, text, reason)
        return self._head + b',"choices":[' + choice + b"]" + figures + b"}\n\n"

    def _text_opening(self) -> bytes:
        return b'"delta":{"content":"' if self._chat else b'"text":"'

    def _word(self, index: int, position: int) -> bytes:
        """Plain ASCII letters and a space: nothing that JSON would have to escape."""
        word = _WORDS[(self._first_word[index] + position * _STRIDE) % len(_WORDS)]
        return word if position == 0 else b" " + word

    def _usage(self) -> bytes:
        prompt_tokens = sum(generation.prompt_tokens for generation in self._generations)
        completion_tokens = sum(generation.num_tokens for generation in self._generations)
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}' % (
            prompt_tokens,
            prompt_tokens + completion_tokens,
            completion_tokens,
        )

    @staticmethod
    def _figures(generation: Generation) -> bytes:
        figures = {"ttft_s": generation.ttft_s, "queue_s": generation.queue_s}
        return b'"x_headway_engine":' + msgspec.json.encode(figures)
