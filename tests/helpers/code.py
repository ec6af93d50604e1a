"""Runs `python -c CODE ARGUMENTS...` as `python -m tests.helpers.code CODE ARGUMENTS...`, a module that `zygote.run`
accepts."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
