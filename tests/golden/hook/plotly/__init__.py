"""In place of plotly, which the old commit imports for its reports."""
