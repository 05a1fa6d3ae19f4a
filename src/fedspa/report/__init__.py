"""From the outputs of runs to a study's tables, figures and page. Nothing in here needs torch."""
