"""The networks, one architecture a file. Each is an `nn.Module` that takes facts of the data set by the names of its
parameters (arguments.py): channels, image_size and classes of images; input_shape, features, vocabulary, outputs.

Inputs are float [N, channels, height, width], float [N, features] or int64 tokens [N, length]. Outputs are logits
[N, classes], or numbers [N, outputs]. Batches of images are in channels-last format. It is the fast memory format,
except for many channels on a CPU; any format works. Beside its parameters a network may only have the running
statistics of BatchNorm (batchnorm.py) as state.
"""
