"""Studies: the jobs of a multirun, which of them are finished, and what became of the others."""
