"""`python -m tests.helpers.code CODE ARGUMENTS...` runs `python -c CODE ARGUMENTS...` as a module for `zygote.run`."""

import sys

if __name__ == "__main__":
    exec(sys.argv.pop(1), {"__name__": "__main__"})
