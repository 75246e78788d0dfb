"""The copy of a run's folder in a bucket of S3 or Google Cloud Storage."""
