"""Model families: the only list. A new family is a folder beside `m3diff/` and a line here."""
