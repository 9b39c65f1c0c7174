#include "activity.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace train_gpt {

void say_last_words(std::string who, std::shared_ptr<const Activity> activity) {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // inherited by all threads to come
  std::thread([signals, who = std::move(who), activity = std::move(activity)] {
    int signal = 0;
    ::sigwait(&signals, &signal);
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::fprintf(stderr, "%s, %s: asked to end by signal %d\n", who.c_str(),
                 activity->get().c_str(), signal);
    std::_Exit(128 + signal);
  }).detach();
}

}  // namespace train_gpt
