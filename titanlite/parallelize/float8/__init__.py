"""Linear layers that multiply in float8."""
