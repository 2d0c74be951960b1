"""
Show a plan as one HTML file that opens without a network: `unity-opt --report`, `Plan.report`.

`graph.py`, `timeline.py`, `links.py` and `baselines.py` make the data, each of one section; `page.py` puts them as JSON
into `page.html`, with `page.css` and the scripts (`view.js`, `graph.js`, `timeline.js`, `page.js`), which draw them.
"""
