"""From a finished run to the file of one client's model, for programs that do not know fedspa."""
