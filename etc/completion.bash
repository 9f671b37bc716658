# shellcheck shell=bash
# Bash completion of elastic and elastic-*: commands, options and names of runs. The program itself
# is asked (click), which takes a third of a second.

_elastic() {
    local words=("${COMP_WORDS[@]}") at="${COMP_CWORD}" kind answer
    words[0]="${words[0]/#\~/${HOME}}"
    local program="${words[0]##*/}" home="${words[0]%"${words[0]##*/}"}"
    if [[ "${program}" == elastic-* ]]; then
        words=(elastic "${program#elastic-}" "${words[@]:1}")
        at=$((at + 1))
    fi
    COMPREPLY=()
    while IFS=, read -r kind answer; do
        case "${kind}" in
            plain) COMPREPLY+=("${answer}") ;;
            file | dir) compopt -o default ;;
        esac
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD="${at}" _ELASTIC_COMPLETE=bash_complete "${home}elastic" 2>/dev/null)
}
complete -F _elastic elastic elastic-{audit,chaos,config,doctor,evaluate,logs,metrics,plan,reconcile,report,sandbox,scale,status,stop,submit,validate}
