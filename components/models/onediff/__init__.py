"""OneDiff (arXiv 2407.05645): a LLaVA that reads, beside two images, tokens of the difference between them."""
