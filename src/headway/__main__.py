"""``python -m headway``: the same command line as ``headway``, for places where the script is not on the path."""

from headway.cli.main import main

main()
