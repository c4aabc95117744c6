"""Studies behind the reports in outputs/results, run by hand."""
