"""Converter from GRL's configurations to Volley's: `python -m volley_grl tunix_base.yaml > run.yaml`."""
