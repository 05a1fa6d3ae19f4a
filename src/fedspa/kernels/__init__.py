"""What torch computes slowly on a CPU, in C, built by the machine's own compiler where it has one."""
