"""The ``headway`` command: names the verbs and maps Headway's errors to exit codes.

Exit codes: 0 done, 1 failed, 2 usage or configuration. Verbs are imported when called, so ``headway version`` stays
quick however heavy another verb is.
"""

from __future__ import annotations

import sys

from cyclopts import App

import headway
from headway.errors import ConfigError, DatasetError, EngineInputError, HeadwayError

app = App(
    name="headway",
    help="Route every LLM query to the model instance that gives the most useful answer in time.",
    version=headway.__version__,
)
app.command("headway.cli.demo:demo", name="demo")
app.command("headway.cli.serve:serve", name="serve")
app.command("headway.cli.validate:validate", name="validate")
app.command("headway.cli.route:route", name="route")
app.command("headway.cli.engine:engine", name="engine")
app.command("headway.cli.bench:app", name="bench")
app.command("headway.cli.version:version", name="version")


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        code = app(exit_on_error=False, print_error=True, result_action="return_value")
    except (ConfigError, DatasetError, EngineInputError) as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(2)
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
