"""In place of plotly, which the old commit imports for its reports. No case compares a report."""
