"""The console: pages for people, served by the gateway next to its API.

Reading order: `site` (what every page passes through: login, forms, headers), `pages` (what they show), `actions` (what
their forms do), `views` (tasks as a tree and a timeline). `templates/` holds the HTML, `static/` the style and script.
"""
