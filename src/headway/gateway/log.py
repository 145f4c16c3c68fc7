"""One line of JSON per event, so that logs can be searched by field. Prompts, answers and secrets are never logged."""

from __future__ import annotations

import logging
import time

import msgspec

logger = logging.getLogger("headway")


class JsonLines(logging.Formatter):
    """A record as one line: ``ts``, ``level``, ``event``, then its own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        fields: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        fields.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(fields, enc_hook=str).decode()


def event(level: int, name: str, **fields: object) -> None:
    """Log ``name`` with its fields; those that are None are left out."""
    if logger.isEnabledFor(level):
        known = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, name, extra={"fields": known})


def configure(level: str) -> None:
    """Send Headway's and the server's logs to standard error, one line of JSON each."""
    # Who is logged nowhere need not be found out for every line (the logging module's own advice).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("headway", "uvicorn.error", "opentelemetry"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(level.upper())
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every export that it will try again
    if logging.getLevelName(level.upper()) == logging.INFO:
        logging.getLogger("uvicorn.error").setLevel(
            logging.WARNING
        )  # its start-up prose says nothing that ours does not
