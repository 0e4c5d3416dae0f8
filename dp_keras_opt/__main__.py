"""`python -m dp_keras_opt` is the command `dp-keras-opt`.

Python imports the library before it runs this file: `python -m dp_keras_opt_cli` is quicker.
"""

import sys

from dp_keras_opt_cli import main

if __name__ == "__main__":
    sys.exit(main())
