"""Entry point of `python -m cotrain`. Lightning uses it to start the further processes of a run."""

import sys

from cotrain.cli import main

sys.exit(main())
