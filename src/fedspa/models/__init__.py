"""The networks: one file an architecture, each an `nn.Module` called with (channels, image_size, classes).

Input float [N, channels, image_size, image_size], output logits [N, classes]. Batches come channels-last, which is
the fast memory format but for many channels on a CPU; any works. Of state beside its parameters a
network may have BatchNorm's running statistics (batchnorm.py), and nothing else.
"""
