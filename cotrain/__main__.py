"""`python -m cotrain`: what Lightning starts anew for each further process."""

import sys

from cotrain.cli import main

sys.exit(main())
