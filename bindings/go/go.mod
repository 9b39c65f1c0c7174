module github.com/shardweave/shardweave/bindings/go

go 1.19
