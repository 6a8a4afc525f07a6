from fedmll.cli.main import main

main()
