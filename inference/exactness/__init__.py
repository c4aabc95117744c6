"""The checks of exactness: five checks, and the verdict that combines them."""
