"""m3diff: from pairs of images to a model that describes what changed.

Importing this package has no side effects. Entry points must call `m3diff.runtime.prepare` first.
"""
