"""Export the trained model (`hub`) or the mixture of samples (`llava`) to a folder that can be shared.

A dataset is rejected if its licence does not allow redistribution.
"""
