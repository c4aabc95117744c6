"""Export of draft folders to the layouts that serving engines load."""
