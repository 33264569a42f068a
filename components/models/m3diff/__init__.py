"""M3Diff (arXiv 2503.11093): LLaVA-OneVision with the Multi-scale Differential Perception (MDP) module."""
