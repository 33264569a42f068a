"""BLIP2IDC as others load it: the model is transformers' own BLIP-2, and the processor is this project's."""
