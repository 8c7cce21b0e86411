"""Drawings of timelines, planned or measured: text, SVG and HTML, Chrome traces."""
