"""What the project raises of itself."""


class DataError(ValueError):
    """Something in the user's data is wrong. The text names file, row, field, rule, value and remedy."""
