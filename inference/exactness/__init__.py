"""The checks of exactness. This package runs five checks and combines them into the verdict."""
