import configparser

from tidegate_local import builder


def test_a_build_gets_the_machines_package_sources_and_nothing_else_of_its_pip_settings() -> None:
    settings = {
        "index-url": "https://packages.test/simple",
        "find-links": "/wheels\n/more",
        "user": "true",
        "target": "/x",
    }
    read = configparser.ConfigParser()
    read.read_string(builder.pip_configuration(settings))
    assert dict(read["global"]) == {
        "index-url": "https://packages.test/simple",
        "find-links": "/wheels /more",
        "cert": "/etc/ssl/certs/ca-certificates.crt",
        "disable-pip-version-check": "true",
    }
