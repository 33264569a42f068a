"""BLIP2IDC: BLIP-2 as it is on one picture of both images, stacked, with adapters in all its parts."""
