"""Local training: the module, its step, and the engines that compute it."""
