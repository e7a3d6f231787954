"""What setuptools cannot read from pyproject.toml: the packages below titanlite/models.

titanlite/models is a link to models. On Windows, and in a zip download, it is a text file; the
packages are then found in models itself.
"""

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["titanlite*"])
folders = {}
if "titanlite.models" not in packages:
    packages += [f"titanlite.{name}" for name in find_namespace_packages(include=["models*"])]
    folders["titanlite.models"] = "models"

setup(packages=packages, package_dir=folders)
