"""What every figure is checked for."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def texts(figure):
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


def assert_legible(figure):
    """No text under 7 points, and nothing beyond the edge of the paper."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # the layout is made now
    assert min(text.get_fontsize() for text in texts(figure)) >= 7
    box = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.005
