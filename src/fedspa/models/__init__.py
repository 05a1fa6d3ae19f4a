"""The networks: one file an architecture, each an `nn.Module` called with (channels, image_size, classes).

Input float [N, channels, image_size, image_size], output logits [N, classes]; either memory format of the
input works, channels-last is the fast one. None has state beside its parameters (no BatchNorm buffers).
"""
