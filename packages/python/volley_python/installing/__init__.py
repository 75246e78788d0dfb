"""Install packages of Python beside those of the project."""
