"""The checks of exactness, and the verdict from them."""
