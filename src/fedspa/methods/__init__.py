"""Federated methods: one file each, explicit state in, state out. None knows rounds' loops, configs or files."""
