"""CPU kernels in C for operations that are slow in torch. The machine's compiler builds them, if there is one."""
