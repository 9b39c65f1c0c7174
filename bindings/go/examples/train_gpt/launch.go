package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// startProcesses starts this program once per rank. When one fails, the others have a moment to find out
// by themselves.
func startProcesses(ctx context.Context, s *settings, args []string) int {
	program, err := os.Executable()
	if err != nil {
		return fail("train_gpt", err, exitFailed)
	}
	port, err := freePort()
	if err != nil {
		return fail("train_gpt", err, exitFailed)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ranks := make([]*exec.Cmd, s.ranks())
	errs := make(chan error, len(ranks))
	var wg sync.WaitGroup
	for rank := range ranks {
		command := exec.Command(program, args...)
		command.Stdout, command.Stderr = os.Stdout, os.Stderr
		command.Env = append(os.Environ(), "RANK="+strconv.Itoa(rank), "WORLD_SIZE="+strconv.Itoa(len(ranks)),
			"LOCAL_RANK="+strconv.Itoa(rank), "LOCAL_WORLD_SIZE="+strconv.Itoa(len(ranks)),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port))
		// No process outlives this one.
		command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := command.Start(); err != nil {
			errs <- err
			stop()
			break
		}
		ranks[rank] = command
		wg.Add(1)
		go func(rank int) {
			defer wg.Done()
			if err := command.Wait(); err != nil {
				errs <- fmt.Errorf("rank %d: %w", rank, err)
				stop()
			}
		}(rank)
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-ctx.Done():
		for _, signal := range []syscall.Signal{0, syscall.SIGTERM, syscall.SIGKILL} {
			for _, command := range ranks {
				if command != nil && signal != 0 {
					command.Process.Signal(signal)
				}
			}
			select {
			case <-ended:
			case <-time.After(3 * time.Second):
			}
		}
		<-ended
	}
	select {
	case err := <-errs: // the first
		return fail("train_gpt", err, exitFailed)
	default:
		return 0
	}
}

// freePort was free a moment ago.
func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}
