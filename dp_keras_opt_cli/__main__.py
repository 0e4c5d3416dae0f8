"""`python -m dp_keras_opt_cli` is the command `dp-keras-opt`."""

import sys

from dp_keras_opt_cli import main

if __name__ == "__main__":
    sys.exit(main())
