"""{{ cookiecutter.project_name }}."""
