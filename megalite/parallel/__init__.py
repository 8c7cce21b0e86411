"""The rooms: one folder a parallelism. Siblings never import each other; each room's docstring is its door plate."""
