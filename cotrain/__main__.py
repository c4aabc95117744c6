"""`python -m cotrain`: Lightning starts the further processes of a run with it."""

import sys

from cotrain.cli import main

sys.exit(main())
