"""What is measured and how it is said."""
