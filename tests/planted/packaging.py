"""Planted bugs of the package and of the import direction."""

# fmt: off
ROWS_OF_BUGS = [
    ('paths_neighbour_first', 'cotrain/paths.py', 'places = (package / f"_{name}", package.parent / name)', 'places = (package.parent / name, package / f"_{name}")', ['tests/test_package.py::test_the_packed_folder_wins'], "an installed wheel reads another package's data"),
    ('wheel_without_data', 'pyproject.toml', '"data" = "cotrain/_data"', '', ['tests/test_package.py::test_wheel_packs_conf_and_data_inside_the_package'], 'data/ lands at the top of site-packages'),
    ('inference_imports_training', 'inference/verify/chain.py', 'import torch\n', 'import torch\nfrom omegaconf import OmegaConf\n', ['tests/test_imports.py::test_inference_names_no_training_library[inference/verify/chain.py]'], 'inference no longer ships alone'),
]
